"""A load client for any OpenAI-compatible server: `enginectl bench serve`.

A request's way: `arrivals` decides what is asked and when, `run` asks, `client` and `connection` carry it, `answers`
reads what comes back, `report` makes numbers of it, `plot` and `page` pictures.
"""
