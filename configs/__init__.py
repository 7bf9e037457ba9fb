"""Training configs: each file's `get_config()` states what differs from the typed base in train/config.py."""
