"""The main job: run the target once over a source of tokens, and write its states as a store."""
