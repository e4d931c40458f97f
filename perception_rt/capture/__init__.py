"""Sources of frames and the newest-frame slot."""
