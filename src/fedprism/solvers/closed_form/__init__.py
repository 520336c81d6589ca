"""Answers by algebra: dense layers and labels."""
