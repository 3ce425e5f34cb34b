//! How much freed memory the allocator keeps.

#![expect(unsafe_code, reason = "a setting of the C library")]

/// Makes the allocator return large blocks to the system when they are freed.
///
/// glibc maps blocks of 128 KiB and more, and unmaps them when they are freed. But each such free
/// may raise that threshold, up to 32 MiB, and with it the free memory kept at the end of a heap,
/// to twice as much; there are up to eight heaps per core. A service that has compressed large
/// checkpoints would keep hundreds of megabytes that the trainer needs. Setting the threshold stops
/// it from growing.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn give_back() {
    /// glibc's initial threshold, in bytes.
    const MAPPED_FROM: libc::c_int = 128 << 10;
    // SAFETY: `mallopt` takes two numbers and, under the allocator's locks, changes only where
    // later blocks come from.
    let done = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM) };
    if done == 0 {
        tracing::warn!("mallopt failed: the C library may keep freed memory");
    }
}

/// Other C libraries return freed memory by themselves.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn give_back() {}
