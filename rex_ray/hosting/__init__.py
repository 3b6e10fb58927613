"""Where a controller lives while a run goes on, whoever carries the messages: no Ray.

``control_host`` and what it judges with read no clock; the service, the pump and the poller around it do.
"""
