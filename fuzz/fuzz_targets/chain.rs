#![no_main]

#[global_allocator]
static MEMORY: s4_fuzz_targets::memory::Counting = s4_fuzz_targets::memory::Counting;

libfuzzer_sys::fuzz_target!(|data: &[u8]| s4_fuzz_targets::chain(data));
