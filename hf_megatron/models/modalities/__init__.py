"""Model inputs other than text: images, video and audio."""
