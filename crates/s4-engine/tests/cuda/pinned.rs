//! Page-locked memory, wherever it comes from.

use s4_codec_gpu::Pinned;

use crate::support::gpu;

const MIB: usize = 1 << 20;

#[test]
fn page_locked_memory_is_zeroed_and_within_a_devices_reach() {
    let Some(gpu) = gpu() else { return };
    // From 2 MiB on they are pages of the process. The emulated driver refuses to lock 10 MiB, and
    // gives 6 MiB another address on the device, so it allocates these itself.
    for bytes in [0, 1, 4097, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3, 6 * MIB, 10 * MIB, 70 * MIB] {
        let pinned = Pinned::new(&gpu.device, bytes).unwrap();
        let len = bytes.max(1);
        assert_eq!((pinned.len(), pinned.is_empty()), (len, false));
        let places = [0, len / 3, len / 2, len - 1];
        // SAFETY: nothing is in flight on it.
        let mine = unsafe { pinned.slice_mut(0, len) };
        assert_eq!(pinned.address(0), mine.as_ptr() as u64);
        assert!(places.iter().all(|&at| mine[at] == 0), "{bytes}");
        places.iter().zip(1..).for_each(|(&at, n)| mine[at] = n);
        let there = gpu.pool.alloc(&gpu.stream, len as u64, "a test").unwrap();
        // SAFETY: the device's memory is as large, and both are waited for.
        unsafe {
            gpu.stream.copy_to_device(&pinned, 0, len, there.address()).unwrap();
            gpu.stream.synchronize().unwrap();
        }
        let expected = mine.to_vec();
        // Copies in flight when memory is dropped are done before it goes.
        // SAFETY: as above.
        unsafe { gpu.stream.copy_to_host(there.address(), &pinned, 0, len).unwrap() };
        drop(pinned);
        assert!(gpu.download(there.address(), len as u64) == expected, "{bytes}");
    }
}

#[test]
fn more_than_there_is_is_an_error() {
    let Some(gpu) = gpu() else { return };
    for bytes in [usize::MAX, usize::MAX - (1 << 20), 1 << 60] {
        Pinned::new(&gpu.device, bytes).unwrap_err();
    }
}
