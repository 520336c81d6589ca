"""Maximum Knowledge Orthogonality Reconstruction (Wang, Velipasalar and Gursoy)."""
