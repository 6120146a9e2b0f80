"""The OpenAI-compatible server.

__main__: the command. app: the routes. body: requests. reply: the form in which answers are sent. worker: the thread
that owns the engine. grammar: formats that answers have to follow. answer_parser: tool calls and reasoning in answers.
metrics: what operators watch.
"""
