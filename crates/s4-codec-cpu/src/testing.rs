//! The contract of [`Codec`] as a test suite for any implementation, also in other crates.
//!
//! Deliberately absent: skips. A codec that refuses some data must declare which, and refuse
//! exactly that. Every function panics when the contract is broken, so that it can be called from a
//! test.

use s4_format::{Error, Result};

use crate::Workspace;
use crate::codec::{Codec, Context, Encoded, Symbols};

/// The setup that both the encoder and the decoder get in the suite.
#[derive(Debug, Clone, Copy)]
pub struct StreamSetup<'a> {
    /// The parameter of the streams.
    pub param: u8,
    /// Shared tables, or nothing.
    pub tables: &'a [u8],
    /// Number of different contexts; 0 = none are given.
    pub contexts: u8,
}

impl StreamSetup<'static> {
    /// A parameter, and no side data.
    pub const fn of(param: u8) -> Self {
        Self { param, tables: &[], contexts: 0 }
    }
}

/// Runs a codec through the whole suite:
///
/// - what it encodes, it decodes to the same bytes, for inputs of many sizes and shapes, empty and
///   single ones among them; the same bytes are written whatever `dst` held before and whatever the
///   workspace was used for;
/// - it refuses, as `Unsupported`, exactly the inputs for which `accepts` is false;
/// - no output is longer than [`Codec::bound`], and a smaller `dst` is refused as `Limit`;
/// - if the symbols are declared sparse, its output still decodes to them;
/// - given shared tables and the choice, a stream that is not reported as `shared` decodes without
///   them;
/// - given a following stream, it carries the end of that stream or nothing, and what it says it
///   carries is decoded again; plain [`Codec::decode`] refuses a stream that carries something, as
///   `Unsupported`;
/// - a stream with any one bit flipped, cut anywhere, with bytes after it, with another parameter
///   or for another length gives an error or data, never a panic, and the same whatever `dst` held;
/// - [`Codec::decode_carrying`] agrees with [`Codec::decode`]: the same data and nothing carried,
///   or an error where [`Codec::decode`] gives one, unless something is carried.
///
/// A codec that carries must be run through [`carrying`] as well.
///
/// # Panics
/// If the codec breaks the contract.
pub fn conformance(codec: &dyn Codec, side: StreamSetup<'_>, accepts: impl Fn(&[u8]) -> bool) {
    let mut used = Workspace::default();
    for (name, data) in inputs() {
        let contexts = contexts(side, data.len());
        let symbols = Symbols::new(&data, context(side, &contexts));
        match round_trip(codec, &symbols, &mut used) {
            Ok(_) => assert!(accepts(&data), "{name}: encoded data that it should refuse"),
            Err(Error::Unsupported { what, .. }) => assert!(!accepts(&data), "{name}: {what}"),
            Err(error) => panic!("{name} of {} bytes: {error}", data.len()),
        }
        // Of the long inputs, only the one that is most like real planes.
        if accepts(&data) && (data.len() < 10_000 || name == "skewed") {
            variants(codec, name, &symbols, &mut used);
        }
    }
    for (name, data) in damage_inputs().into_iter().filter(|(_, data)| accepts(data)) {
        let contexts = contexts(side, data.len());
        let ctx = context(side, &contexts);
        let stream = match round_trip(codec, &Symbols::new(&data, ctx), &mut used) {
            Ok((stream, _)) => stream,
            Err(error) => panic!("{name}: {error}"),
        };
        damage(&stream, side.param, data.len(), |param, stream, len| {
            let _ = decode(codec, Context { param, ..ctx }, stream, len);
        });
    }
}

/// Tests the other settings that an encoder may get.
fn variants(codec: &dyn Codec, name: &str, symbols: &Symbols<'_>, used: &mut Workspace) {
    let behind = noise(4096 + symbols.bytes.len() / 16, 11);
    for symbols in [
        Symbols { own_tables: true, ..*symbols },
        Symbols { sparse: true, behind: &behind, ..*symbols },
    ] {
        if let Err(error) = round_trip(codec, &symbols, used) {
            panic!("{name} of {} bytes: {error}", symbols.bytes.len());
        }
    }
}

/// Runs a codec that carries through a suite of its own.
///
/// - It carries something for every input of [`conformance`] that is not empty;
/// - if the next stream is shorter than what it could carry, it carries only that;
/// - damaged streams that carry, as in [`conformance`], give an error or data.
///
/// # Panics
/// If the codec breaks the contract.
pub fn carrying(codec: &dyn Codec, side: StreamSetup<'_>) {
    let mut used = Workspace::default();
    let mut encoded = |symbols: &Symbols<'_>| match round_trip(codec, symbols, &mut used) {
        Ok(encoded) => encoded,
        Err(error) => panic!("{} bytes: {error}", symbols.bytes.len()),
    };
    for (name, data) in inputs().into_iter().filter(|(_, data)| !data.is_empty()) {
        let contexts = contexts(side, data.len());
        let behind = noise(4096 + data.len() / 16, data.len() as u64);
        let symbols = Symbols { behind: &behind, ..Symbols::new(&data, context(side, &contexts)) };
        let most = encoded(&symbols).1.carried;
        assert!(most > 0, "{name}: stream for {} bytes carries nothing", data.len());
        encoded(&Symbols { behind: &behind[..most], ..symbols });
        encoded(&Symbols { behind: &behind[..most - 1], ..symbols });
    }
    for (_, data) in damage_inputs() {
        let contexts = contexts(side, data.len());
        let (ctx, behind) = (context(side, &contexts), noise(4096, 12));
        let (stream, _) = encoded(&Symbols { behind: &behind, ..Symbols::new(&data, ctx) });
        damage(&stream, side.param, data.len(), |param, stream, len| {
            let _ = decode_carrying(codec, Context { param, ..ctx }, stream, len);
        });
    }
}

/// Encodes symbols, decodes them and compares, both with a fresh workspace and with `used`; returns
/// the stream, and what the encoder says about it.
///
/// # Errors
/// The encoder's error.
///
/// # Panics
/// If the codec breaks the contract.
pub fn round_trip(
    codec: &dyn Codec,
    symbols: &Symbols<'_>,
    used: &mut Workspace,
) -> Result<(Vec<u8>, Encoded)> {
    let Symbols { bytes: data, context: ctx, behind, .. } = *symbols;
    let bound = codec.bound(ctx.param, data.len());
    if let Some(less) = bound.checked_sub(1) {
        let refused = codec.encode(symbols, &mut vec![0; less], used);
        assert!(
            matches!(refused, Err(Error::Limit { .. } | Error::Unsupported { .. })),
            "encoded into a buffer smaller than the bound: {refused:?}"
        );
    }
    let mut dst = vec![0; bound];
    let encoded = codec.encode(symbols, &mut dst, &mut Workspace::default())?;
    let Encoded { len, carried, shared } = encoded;
    assert!(len <= bound, "{len} bytes written, bound {bound}");
    dst.truncate(len);

    let mut dirty = vec![0xa5; bound + 100];
    let again = codec.encode(symbols, &mut dirty, used)?;
    assert_eq!(again, encoded, "encoding again gave a different result");
    assert!(dirty[..len] == dst, "output depends on earlier content of the memory");
    assert!(dirty[bound..].iter().all(|&b| b == 0xa5), "wrote past the bound");

    assert!(carried <= behind.len(), "{carried} of {} bytes carried", behind.len());
    let carry = &behind[behind.len() - carried..];
    let ctx = if shared { ctx } else { Context { tables: &[], ..ctx } };
    let mut back = vec![0x77; data.len()];
    let alone = codec.decode(ctx, &dst, &mut back, used);
    if carried > 0 {
        assert!(matches!(alone, Err(Error::Unsupported { .. })), "carries {carried}: {alone:?}");
        let decoded = decode_carrying(codec, ctx, &dst, data.len());
        assert!(
            decoded.is_ok_and(|(back, c)| back == data && c == carry),
            "decoded data or carried bytes differ"
        );
    } else {
        assert!(
            alone == Ok(()) && back == data,
            "decoding {} bytes gave different data: {alone:?}",
            data.len()
        );
        let decoded = decode(codec, ctx, &dst, data.len());
        assert!(
            decoded.is_ok_and(|back| back == data),
            "decoding depends on earlier content of the memory"
        );
    }
    Ok((dst, encoded))
}

/// Decodes into two buffers with different previous content and checks that the outcome is the
/// same, and that [`Codec::decode_carrying`] agrees.
///
/// # Errors
/// The decoder's error.
///
/// # Panics
/// If the outcome depends on what the buffer held.
pub fn decode(codec: &dyn Codec, ctx: Context<'_>, stream: &[u8], len: usize) -> Result<Vec<u8>> {
    let mut zeros = vec![0x00; len];
    let mut ones = vec![0xff; len];
    let first = codec.decode(ctx, stream, &mut zeros, &mut Workspace::default());
    let second = codec.decode(ctx, stream, &mut ones, &mut Workspace::default());
    assert_eq!(first, second, "result depends on earlier content of the buffer");
    match decode_carrying(codec, ctx, stream, len) {
        Ok((data, carry)) if carry.is_empty() => {
            assert_eq!(first, Ok(()), "refused a stream that carries nothing");
            assert!(data == zeros, "`decode_carrying` gave different data");
        }
        Ok(_) => assert!(first.is_err(), "decoded a stream that carries bytes"),
        Err(error) => assert_eq!(first, Err(error), "`decode_carrying` gave a different error"),
    }
    first?;
    assert!(zeros == ones, "decoded data depends on earlier content of the buffer");
    Ok(zeros)
}

/// Decodes data and what the stream carries, twice, into memory with different previous content,
/// the second time with a workspace that was just used, and checks that the outcome is the same.
///
/// # Errors
/// The decoder's error.
///
/// # Panics
/// If the outcome depends on what the memory held.
pub fn decode_carrying(
    codec: &dyn Codec,
    ctx: Context<'_>,
    stream: &[u8],
    len: usize,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let mut work = Workspace::default();
    let mut attempt = |fill, carry| {
        let mut state = (vec![fill; len], carry);
        codec.decode_carrying(ctx, stream, &mut state.0, &mut state.1, &mut work).map(|()| state)
    };
    let first = attempt(0x00, Vec::new());
    let second = attempt(0xff, vec![0x5a; 1000]);
    assert!(first == second, "result depends on earlier content of the memory");
    first
}

/// Calls `attempt` with parameter, stream and length for every kind of damage that the suite knows.
/// Whether a decoder notices the damage does not matter: that is what checksums are for.
fn damage(stream: &[u8], param: u8, len: usize, attempt: impl Fn(u8, &[u8], usize)) {
    let mut copy = stream.to_vec();
    for bit in 0..8 * stream.len() {
        copy[bit / 8] ^= 1 << (bit % 8);
        attempt(param, &copy, len);
        copy[bit / 8] ^= 1 << (bit % 8);
    }
    for cut in 0..stream.len() {
        attempt(param, &stream[..cut], len);
    }
    for at in 0..stream.len() {
        for byte in [0x00, 0xff] {
            copy[at] = byte;
            attempt(param, &copy, len);
        }
        copy[at] = stream[at];
    }
    for extra in [1, 2, 16, 300] {
        copy.resize(stream.len() + extra, 0x5a);
        attempt(param, &copy, len);
    }
    for other in 0..=255 {
        attempt(other, stream, len);
    }
    // The contexts are those of `len` symbols: other lengths are refused if there are any.
    for other in [0, 1, len.saturating_sub(1), len + 1, 2 * len, len + 20_000] {
        attempt(param, stream, other);
    }
}

/// The context that encoders and decoders get for a side.
fn context<'a>(side: StreamSetup<'a>, contexts: &'a [u8]) -> Context<'a> {
    Context { param: side.param, tables: side.tables, contexts }
}

/// Contexts for `len` symbols.
fn contexts(side: StreamSetup<'_>, len: usize) -> Vec<u8> {
    match side.contexts {
        0 => Vec::new(),
        n => noise(len, 77).into_iter().map(|b| b % n).collect(),
    }
}

/// Pseudorandom bytes, the same at every call.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed;
    let next = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 56) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Symbols like the exponents of weights: few, each half as frequent as the one before, and rarely
/// any other.
fn skewed(len: usize, seed: u64) -> Vec<u8> {
    let odd = noise(len, seed + 1);
    let rare = |(i, b): (usize, u8)| match odd[i] {
        200 => b,
        _ => 120 - (b.trailing_zeros() as u8).min(10),
    };
    noise(len, seed).into_iter().enumerate().map(rare).collect()
}

/// Noise, except where an encoder that samples 64 of each 512 symbols looks: its model is as wrong
/// as can be.
fn deceptive(len: usize) -> Vec<u8> {
    let mut data = noise(len, 5);
    for (window, part) in data.chunks_mut(512).enumerate() {
        let start = (64 * (5 * window % 8)).min(part.len());
        let end = (start + 64).min(part.len());
        part[start..end].fill(7);
    }
    data
}

/// Inputs of many sizes and shapes, named.
fn inputs() -> Vec<(&'static str, Vec<u8>)> {
    let sizes = [0, 1, 2, 3, 7, 8, 9, 17, 64, 255, 256, 257, 1000, 4096, 8192, 8193];
    let large = [16_383, 16_384, 16_385, 33_000, 50_000, 65_536, 70_001, 140_000];
    let mut all = Vec::new();
    for len in sizes.into_iter().chain(large) {
        all.extend([
            ("zeros", vec![0; len]),
            ("ones", vec![0xff; len]),
            ("counter", (0..len).map(|i| i as u8).collect()),
            ("period 3", (0..len).map(|i| [5, 6, 9][i % 3]).collect()),
            ("period 16", (0..len).map(|i| (i % 16) as u8 * 17).collect()),
            ("one odd one", (0..len).map(|i| u8::from(i + 1 == len)).collect()),
            ("bits", noise(len, 1).into_iter().map(|b| b & 1).collect()),
            ("7 bits", noise(len, 2).into_iter().map(|b| b & 127).collect()),
            ("noise", noise(len, 3)),
            ("skewed", skewed(len, 4)),
            ("two halves", (0..len).map(|i| if i < len / 2 { 3 } else { 200 }).collect()),
            ("deceptive", deceptive(len)),
        ]);
    }
    all
}

/// Inputs whose streams are damaged in every way: short, because there are many ways.
fn damage_inputs() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("empty", Vec::new()),
        ("single", vec![1]),
        ("unit", (0..100).map(|i| [1, 2, 3][i % 3]).collect()),
        ("bits", noise(300, 6).into_iter().map(|b| b & 1).collect()),
        ("skewed", skewed(700, 7)),
    ]
}
