"""The HTTP surface: OpenAI-style video jobs, events, media and webhooks. Never imports torch."""
