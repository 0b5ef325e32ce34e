"""Instruments: what a rank holds, what it sends, how long it takes."""
