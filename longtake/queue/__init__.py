"""Durable jobs: the database is the truth, Celery wakes workers, an engine process makes videos."""
