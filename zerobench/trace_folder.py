"""The name of the environment variable by which ranks are told where to leave their traces."""

TRACE_FOLDER = "ZEROBENCH_TRACE_FOLDER"
TARGET = "zerobench.traced:work"
"""What a launcher runs on each rank to have a step traced."""
