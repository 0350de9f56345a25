"""Run sandboxes as QEMU virtual machines whose disks and memory images share blocks (XFS reflinks).

``host`` implements ``hosts.base``. ``machines`` starts and stops machines. The packages are ``image`` (files on
disk), ``qemu`` (one machine), ``memory`` (capture of its memory), ``network`` (slots), ``volumes`` and ``template``.
``ownership`` locks the state root and the network prefix against a second gateway; ``threads`` runs blocking work.
"""
