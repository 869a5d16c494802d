"""The recipe of papercut, the bundled text-to-video model: data, training, judging, export.

Imports ``longtake``; is never imported by it. README.md in this folder tells the whole recipe.
"""
