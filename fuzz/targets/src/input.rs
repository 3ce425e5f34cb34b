//! The fuzzer's bytes, read as choices. After its end, an input continues with zeros.

use s4_planes::Simd;

/// What is left of an input.
#[derive(Clone)]
pub(crate) struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Up to `len` bytes.
    pub(crate) fn take(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.rest.split_at(len.min(self.rest.len()));
        self.rest = rest;
        head
    }

    /// All that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let head = self.take(N);
        std::array::from_fn(|i| head.get(i).copied().unwrap_or(0))
    }

    pub(crate) fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// A number below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::from(self.u8()) % end
    }

    /// One of `list`, which is not empty.
    pub(crate) fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    /// A length: mostly below 512, where executions are fast; often below 4096, now and then up to 65535,
    /// and rarely up to four times that.
    pub(crate) fn len(&mut self) -> usize {
        let [low, high, class] = self.array();
        let len = usize::from(u16::from_le_bytes([low, high]));
        match class {
            0xff => 4 * len,
            0xf8.. => len,
            0x30.. => len % 512,
            _ => len % 4096,
        }
    }
}

/// `len` bytes made from `seed`: its bytes after the first, repeated, with as much noise as its
/// first byte asks for.
pub(crate) fn expand(seed: &[u8], len: usize) -> Vec<u8> {
    let (&how, pattern) = seed.split_first().unwrap_or((&0, &[]));
    let pattern = if pattern.is_empty() { &[0][..] } else { pattern };
    let repeated = pattern.iter().copied().cycle().take(len);
    if how & 7 == 0 {
        return repeated.collect();
    }
    let mut x = 0x9e37_79b9_7f4a_7c15_u64 ^ u64::from(how);
    let mut noise = |i: usize| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(i as u64 | 1);
        let rare = (x >> 32).trailing_zeros() >= u32::from(how >> 3) % 16;
        if rare { (x >> 56) as u8 & (0xff >> (how & 7)) } else { 0 }
    };
    repeated.enumerate().map(|(i, b)| b ^ noise(i)).collect()
}

/// The sets of vector instructions of this machine, plain Rust first.
pub(crate) fn sets() -> impl Iterator<Item = Simd> {
    [Simd::Scalar, Simd::Neon, Simd::Avx2, Simd::Avx512].into_iter().filter(|s| s.is_available())
}
