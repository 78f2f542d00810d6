"""The engine. Imports torch and itself only; read it in the order updates, streams, program,
memory, replay, tape.
"""
