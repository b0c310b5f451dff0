"""What the rooms are built of. Each file serves one of the scripts above; nothing here has to be read to change an idea."""
