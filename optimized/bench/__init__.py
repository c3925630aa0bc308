"""Measuring on sets of questions: what ``rheo bench`` runs, what it writes, and what ``rheo report`` makes of it."""
