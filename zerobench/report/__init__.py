"""Renderers of findings and records, for terminals, files and pages."""
