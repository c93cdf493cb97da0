"""How serving engines name their modules, match exclude entries and load what they find.

Each engine is a YAML file (which modules ask, what each release does) and a small module with the matching logic.
The models are tested against the engines' own code (tests/conformance).
"""
