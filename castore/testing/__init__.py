"""Conformance suites and helpers for those who write backends and drivers, and for castore itself."""
