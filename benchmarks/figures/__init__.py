"""Figures of FusionRAG and Cache-Craft on models and sets that two cores can measure, a file for each measurement."""
