"""The subcommands of `vcal`, one module each.

These modules are imported by every `vcal --help`, so heavy packages are imported inside the functions.
"""
