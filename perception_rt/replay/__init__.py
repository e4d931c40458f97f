"""Playing recordings through the detector without nodes."""
