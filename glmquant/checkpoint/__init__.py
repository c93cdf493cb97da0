"""What a checkpoint is on disk: headers, folders, and writing one safely."""
