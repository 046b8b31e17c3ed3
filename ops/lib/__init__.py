"""The code behind the commands in `ops/`. Not part of the installed package."""
