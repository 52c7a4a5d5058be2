"""The conformance kit: what a plugin subclasses to show that it keeps a role's contract."""
