"""Implementations of ZeRO: the plug-in protocol, the registry, the reference, and adapters, one file each."""
