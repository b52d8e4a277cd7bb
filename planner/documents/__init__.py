"""The documents: frozen types with units, read and written as YAML."""
