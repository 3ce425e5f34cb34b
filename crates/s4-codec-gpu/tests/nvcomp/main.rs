//! nvCOMP on a GPU against the CPU codecs. Without a GPU nothing is run, unless `S4_REQUIRE_GPU=1`.
//! nvCOMP is looked for as always (`NVCOMP_LIBRARY`, then the dynamic linker).

#[path = "../../../s4-codec-cpu/tests/common/data.rs"]
mod data;
mod device;

use device::{Device, Outcome};
use s4_codec_cpu::blocks::{self, Block, Blocks};
use s4_codec_cpu::{
    Codec, Context, Deflate, Gdeflate, Lz4, Simd, Snappy, Symbols, Workspace, Zstd, open_codecs,
};
use s4_codec_gpu::nvcomp::{self, AnsMode, DataType, GpuCodec, Status};
use s4_format::CodecId;

/// Planes of real tensors, and of shapes that real tensors do not have.
fn planes() -> Vec<(&'static str, Vec<u8>)> {
    let mut planes = data::planes(300_000);
    let (_, whole) = planes.pop().expect("the whole values");
    planes.extend([
        ("one", vec![7]),
        ("three", vec![1, 2, 3]),
        ("a block and one", planes[0].1[..65_537].to_vec()),
        ("zeros", vec![0; 200_000]),
        ("counter", (0..100_000u32).map(|i| (i >> 3) as u8).collect()),
    ]);
    planes.push(("bf16 whole", whole));
    planes
}

/// Codecs of the open bitstreams, named.
fn open(device: &Device) -> Vec<(&'static str, Box<dyn GpuCodec>)> {
    let library = &device.library;
    vec![
        ("gdeflate-0", Box::new(nvcomp::gdeflate(library, 0))),
        ("gdeflate-1", Box::new(nvcomp::gdeflate(library, 1))),
        ("gdeflate-5", Box::new(nvcomp::gdeflate(library, 5))),
        ("deflate-0", Box::new(nvcomp::deflate(library, 0))),
        ("deflate-1", Box::new(nvcomp::deflate(library, 1))),
        ("deflate-5", Box::new(nvcomp::deflate(library, 5))),
        ("zstd", Box::new(nvcomp::zstd(library))),
        ("lz4", Box::new(nvcomp::lz4(library))),
        ("snappy", Box::new(nvcomp::snappy(library))),
    ]
}

/// Codecs of the closed bitstreams, named.
fn closed(device: &Device) -> Vec<(&'static str, Box<dyn GpuCodec>)> {
    let library = &device.library;
    vec![
        ("ans bytes", Box::new(nvcomp::ans(library, AnsMode::Bytes))),
        ("ans float16", Box::new(nvcomp::ans(library, AnsMode::Float16))),
        ("ans float32", Box::new(nvcomp::ans(library, AnsMode::Float32))),
        ("bitcomp bytes", Box::new(nvcomp::bitcomp(library, DataType::UCHAR))),
        ("bitcomp u16", Box::new(nvcomp::bitcomp(library, DataType::USHORT))),
        ("cascaded bytes", Box::new(nvcomp::cascaded(library, DataType::UCHAR))),
        ("cascaded u32", Box::new(nvcomp::cascaded(library, DataType::UINT))),
    ]
}

/// Lays coded blocks out as a stream.
fn framed(codec: &dyn GpuCodec, plane: &[u8], coded: &[Vec<u8>]) -> Vec<u8> {
    let longest = coded.iter().map(Vec::len).max().unwrap_or(0);
    let mut stream = vec![0; blocks::bound(plane.len(), codec.block(), |_| longest)];
    let mut next = coded.iter();
    let len = blocks::write(
        plane,
        &mut stream,
        codec.block(),
        |_| longest,
        |_, dst| {
            let block = next.next().expect("as many blocks");
            dst[..block.len()].copy_from_slice(block);
            Ok(block.len())
        },
    );
    stream.truncate(len.expect("fits"));
    stream
}

fn coded_blocks(stream: &[u8], len: usize, block: usize) -> Vec<Vec<u8>> {
    let blocks = Blocks::parse(stream, len, block).expect("parses");
    blocks.iter().map(|Block { stored, .. }| stream[stored].to_vec()).collect()
}

/// Sizes of the blocks of a plane.
fn lens(plane: &[u8], codec: &dyn GpuCodec) -> Vec<usize> {
    plane.chunks(codec.block()).map(<[u8]>::len).collect()
}

fn encode(device: &Device, codec: &dyn GpuCodec, plane: &[u8]) -> Outcome {
    device.encode(codec, &plane.chunks(codec.block()).collect::<Vec<_>>())
}

/// Round trip on the GPU; returns the stream.
fn round_trip(device: &Device, name: &str, codec: &dyn GpuCodec, plane: &[u8]) -> Vec<u8> {
    let coded = encode(device, codec, plane);
    assert!(coded.statuses.iter().all(|s| *s == Status::SUCCESS), "{name}: {:?}", coded.statuses);
    let decoded = device.decode(codec, &coded.blocks, &lens(plane, codec));
    assert!(
        decoded.statuses.iter().all(|s| *s == Status::SUCCESS),
        "{name}: {:?}",
        decoded.statuses
    );
    assert!(decoded.blocks.concat() == plane, "{name}: decoded to other bytes");
    framed(codec, plane, &coded.blocks)
}

#[test]
fn what_the_gpu_writes_is_read_by_the_cpu() {
    let Some(device) = Device::find() else { return };
    let cpu = open_codecs(Simd::detect());
    for (name, codec) in open(&device) {
        for (plane_name, plane) in planes() {
            let name = format!("{name}, {plane_name}");
            let stream = round_trip(&device, &name, &*codec, &plane);
            println!("{name}: {} -> {}", plane.len(), stream.len());
            let mut read = vec![0x5a; plane.len()];
            let reader = cpu.get(codec.id()).expect("registered");
            let (ctx, mut work) = (Context::of(codec.param()), Workspace::default());
            match reader.decode(ctx, &stream, &mut read, &mut work) {
                Ok(()) => assert!(read == plane, "{name}: the CPU reads other bytes"),
                Err(error) => panic!("{name}: {error}"),
            }
            let again = framed(&*codec, &plane, &encode(&device, &*codec, &plane).blocks);
            if again != stream {
                println!("{name}: written differently the second time");
            }
        }
    }
}

#[test]
fn what_the_cpu_writes_is_read_by_the_gpu() {
    let Some(device) = Device::find() else { return };
    let writers: Vec<(Box<dyn Codec>, u8)> = vec![
        (Box::new(Gdeflate::entropy_only()), 0),
        (Box::new(Gdeflate::with_matches()), 0),
        (Box::new(Deflate::new(0)), 0),
        (Box::new(Deflate::new(1)), 0),
        (Box::new(Deflate::new(6)), 0),
        (Box::new(Deflate::new(9)), 0),
        (Box::new(Zstd::new(1)), Zstd::IN_BLOCKS),
        (Box::new(Zstd::new(3)), Zstd::IN_BLOCKS),
        (Box::new(Zstd::new(19)), Zstd::IN_BLOCKS),
        (Box::new(Lz4), 0),
        (Box::new(Snappy), 0),
    ];
    for (writer, param) in writers {
        for (plane_name, plane) in planes() {
            let mut stream = vec![0; writer.bound(param, plane.len())];
            let symbols = Symbols::new(&plane, Context::of(param));
            let encoded = writer.encode(&symbols, &mut stream, &mut Workspace::default());
            let encoded = encoded.expect("encodes");
            let codec = nvcomp::reader(&device.library, writer.id(), param).expect("known");
            let coded = coded_blocks(&stream[..encoded.len], plane.len(), codec.block());
            let decoded = device.decode(&*codec, &coded, &lens(&plane, &*codec));
            let good = decoded.statuses.iter().all(|s| *s == Status::SUCCESS);
            assert!(good, "{writer:?}, {plane_name}: {:?}", decoded.statuses);
            assert!(decoded.blocks.concat() == plane, "{writer:?}, {plane_name}: other bytes");
        }
    }
}

#[test]
fn closed_bitstreams_come_back() {
    let Some(device) = Device::find() else { return };
    for (name, codec) in closed(&device) {
        for (plane_name, mut plane) in planes() {
            plane.truncate(plane.len() / codec.unit() * codec.unit());
            let name = format!("{name}, {plane_name}");
            let stream = round_trip(&device, &name, &*codec, &plane);
            println!("{name}: {} -> {}", plane.len(), stream.len());
            let coded = coded_blocks(&stream, plane.len(), codec.block());
            let reader = nvcomp::reader(&device.library, codec.id(), codec.param()).expect("known");
            let decoded = device.decode(&*reader, &coded, &lens(&plane, &*reader));
            assert!(decoded.blocks.concat() == plane, "{name}: the reader gives other bytes");
        }
        let listed = codec.closed().expect("closed");
        assert_eq!((listed.codec, listed.library_major), (codec.id(), 6));
    }
}

/// Options of 64 bytes go on the stack: if caller and library disagreed about that, the options
/// would be misread, and calls in between would not survive.
#[test]
fn options_arrive_by_value() {
    let Some(device) = Device::find() else { return };
    let library = &device.library;
    let (_, bf16) = planes().pop().expect("planes");
    let size =
        |codec: &dyn GpuCodec, plane: &[u8]| encode(&device, codec, plane).blocks.concat().len();
    // The effect of each option shows in the size.
    let counter: Vec<u8> = (0..100_000u32).map(|i| (i >> 3) as u8).collect();
    let sizes = [0, 1, 5].map(|n| size(&nvcomp::gdeflate(library, n), &counter));
    assert!(sizes[2] < sizes[1] && 10 * sizes[1] < sizes[0], "{sizes:?}");
    let modes = [AnsMode::Bytes, AnsMode::Float16, AnsMode::Float32];
    let ans = modes.map(|mode| size(&nvcomp::ans(library, mode), &bf16));
    assert!(ans[1] < ans[0] && ans[1] < ans[2] && ans[0] != ans[2], "{ans:?}");
    println!("gdeflate {sizes:?}, ans {ans:?} of {}", bf16.len());
    // An option that does not exist is rejected, in queries and in calls.
    let wrong = nvcomp::gdeflate(library, 77);
    assert!(wrong.bound(1000).is_err(), "{:?}", wrong.bound(1000));
    assert!(nvcomp::ans(library, AnsMode::Bytes).bound(1 << 19).is_err());
    // Many calls with options of every format in turn.
    let plane = &bf16[..65_536];
    for _ in 0..20 {
        for (name, codec) in open(&device).into_iter().chain(closed(&device)) {
            round_trip(&device, name, &*codec, plane);
        }
    }
}

/// Blocks of many sizes, of several planes, in one batch; and no blocks at all.
#[test]
fn blocks_of_any_sizes_go_together() {
    let Some(device) = Device::find() else { return };
    let (_, bf16) = planes().pop().expect("planes");
    let lens = [4, 65_536, 8, 100, 40_000, 65_532, 12, 4096];
    let mut rest = &bf16[..];
    let blocks = lens.map(|len| rest.split_off(..len).expect("long enough"));
    for (name, codec) in open(&device).into_iter().chain(closed(&device)) {
        let coded = device.encode(&*codec, &blocks);
        assert!(coded.statuses.iter().all(|s| *s == Status::SUCCESS), "{name}: {coded:?}");
        let decoded = device.decode(&*codec, &coded.blocks, &lens);
        assert!(decoded.blocks == blocks, "{name}: {:?}", decoded.statuses);
        assert!(device.encode(&*codec, &[]).blocks.is_empty());
        assert!(device.decode(&*codec, &[], &[]).blocks.is_empty());
    }
}

/// Only formats for which the library promises to detect damage: the others may do anything. It
/// does not detect all damage, but stays within the block, and the other blocks are decoded.
#[test]
fn damage_stays_within_its_block() {
    let Some(device) = Device::find() else { return };
    let (_, plane) = planes().swap_remove(0);
    let ans = nvcomp::ans(&device.library, AnsMode::Bytes);
    let lz4 = nvcomp::lz4(&device.library);
    for codec in [&ans as &dyn GpuCodec, &lz4] {
        let coded = encode(&device, codec, &plane).blocks;
        let (mut header, mut cut) = (coded.clone(), coded.clone());
        header[0][..16].fill(0xff);
        let half = cut[0].len() / 2;
        cut[0].truncate(half);
        for (name, bad) in [("header", header), ("cut", cut)] {
            let outcome = device.decode(codec, &bad, &lens(&plane, codec));
            let name = format!("{}, {name}", codec.id());
            println!("{name}: {}, {} bytes", outcome.statuses[0], outcome.blocks[0].len());
            assert!(outcome.blocks[0] != plane[..codec.block()], "{name}");
            let rest = &outcome.statuses[1..];
            assert!(rest.iter().all(|s| *s == Status::SUCCESS), "{name}: {rest:?}");
            assert!(outcome.blocks[1..].concat() == plane[codec.block()..], "{name}");
            if name.starts_with("nvcomp-ans, header") {
                assert_eq!(outcome.statuses[0], Status::CANNOT_DECOMPRESS, "{name}");
            }
        }
        // The device still works.
        round_trip(&device, "after damage", codec, &plane);
    }
}

#[test]
fn what_a_batch_must_not_be_is_refused() {
    let Some(device) = Device::find() else { return };
    let codec = nvcomp::gdeflate(&device.library, 0);
    let error = codec.bound(65_537).unwrap_err().to_string();
    assert!(error.contains("gdeflate") && error.contains("65536"), "{error}");
    for (id, param) in [(CodecId::RANS, 8), (CodecId::ZSTD, 0), (CodecId::NVCOMP_ANS, 3)] {
        let error = nvcomp::reader(&device.library, id, param).unwrap_err();
        let error = s4_format::Error::from(error);
        assert!(matches!(error, s4_format::Error::Unsupported { .. }), "{error}");
    }
}

/// Writes the files of `testdata/golden/nvcomp` to the folder that `S4_GOLDEN_OUT` names.
#[test]
fn golden_vectors() {
    let Some(folder) = std::env::var_os("S4_GOLDEN_OUT").map(std::path::PathBuf::from) else {
        return;
    };
    let device = Device::find().expect("a GPU to write golden vectors with");
    for (plane_name, plane) in data::planes(80_000) {
        let Some(plane_name) = ["bf16 high", "bf16 whole"].iter().find(|name| **name == plane_name)
        else {
            continue;
        };
        for (name, codec) in open(&device) {
            let stream = round_trip(&device, name, &*codec, &plane);
            let file = format!("{name}_{}.bin", plane_name.replace(' ', "_"));
            std::fs::write(folder.join(file), stream).expect("writes");
        }
    }
}
