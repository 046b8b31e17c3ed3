"""mlxq: Macs as one text-generation service, fed by Redis. See README.md."""

__version__ = "0.1.0"
