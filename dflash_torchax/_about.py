"""The version, importable without any dependency (setup.cfg reads it)."""

VERSION = "0.1.0"
