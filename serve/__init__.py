"""The online service: the lookup encoder beside index shards, on Ray Serve. No torch, no transformers."""
