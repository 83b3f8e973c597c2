"""The gateway: OpenAI's API in front, tokens behind. It owns HTTP, templates, text, tenants and
migration.
"""
