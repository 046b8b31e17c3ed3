"""The wire: job and event types, key names, Lua scripts, errors. Contract: protocol/README.md."""
