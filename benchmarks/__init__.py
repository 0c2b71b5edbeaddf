"""Measurements, one script or package per question; `python -m benchmarks.suite` holds the library against its peers."""
