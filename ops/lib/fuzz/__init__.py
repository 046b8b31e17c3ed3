"""Fuzzing of all that decodes bytes from Redis. `ops/fuzz` runs it; so do the tests, briefly."""
