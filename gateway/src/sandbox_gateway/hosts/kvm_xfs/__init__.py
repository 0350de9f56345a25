"""QEMU virtual machines whose disks and memories are XFS reflinks of one another.

``host`` implements ``hosts.base``. ``running_machines`` starts and ends machines. The packages: ``image`` (files on
disk), ``qemu`` (one machine), ``memory`` (its capture), ``network`` (slots), ``volumes``, ``template``. ``ownership``
locks the state root and the network prefix against a second gateway; ``threads`` runs work that may block.
"""
