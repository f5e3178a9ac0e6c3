"""Conformance suites and helpers for writers of backends and drivers, and castore itself."""
