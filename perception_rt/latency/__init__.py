"""What happened to every frame: recorded, counted, and stated with its uncertainty."""
