"""The schema's history, applied by ``database.upgrade``; packaged with longtake."""
