"""Measurements of zerobench itself, run on demand: minutes each, and no verdict that a busy machine could turn."""
