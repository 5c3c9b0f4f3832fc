"""The functions of torch.distributed, natively awaitable, and those beyond; each acts on a group or the default one."""
