"""Prints the architectures of the GPUs present as a CMake list ("90a;120"), or nothing. Needs the driver only."""

import ctypes

MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}


def architectures() -> list[str]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = set()
    for device in range(count.value):
        major, minor = ctypes.c_int(0), ctypes.c_int(0)
        driver.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
        number = 10 * major.value + minor.value
        found.add("90a" if number == 90 else str(number))  # wgmma needs the `a`
    return sorted(found)


print(";".join(architectures()))
