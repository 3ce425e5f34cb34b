//! Streams that nvCOMP wrote on a GPU (testdata/golden/nvcomp) are read without one.

#[path = "common/data.rs"]
mod data;

use s4_codec_cpu::{Codec, Context, Gdeflate, Simd, Symbols, Workspace, Zstd, open_codecs};
use s4_format::CodecId;

const LEN: usize = 80_000;

#[test]
fn streams_of_nvcomp_are_read() {
    let codecs = open_codecs(Simd::detect());
    let writers = [
        ("gdeflate-0", CodecId::GDEFLATE, 0),
        ("gdeflate-1", CodecId::GDEFLATE, 0),
        ("gdeflate-5", CodecId::GDEFLATE, 0),
        ("deflate-1", CodecId::DEFLATE, 0),
        ("zstd", CodecId::ZSTD, Zstd::IN_BLOCKS),
        ("lz4", CodecId::LZ4, 0),
        ("snappy", CodecId::SNAPPY, 0),
    ];
    let planes = data::planes(LEN);
    for (plane_name, file) in [("bf16 high", "bf16_high"), ("bf16 whole", "bf16_whole")] {
        let plane = planes.iter().find(|(name, _)| *name == plane_name).expect("a plane");
        let plane = &plane.1;
        assert_eq!(plane.len(), LEN);
        for (writer, id, param) in writers {
            let path = data::folder().join(format!("golden/nvcomp/{writer}_{file}.bin"));
            let stream = std::fs::read(&path).expect("a golden file");
            let codec = codecs.get(id).expect("registered");
            let mut read = vec![0x5a; LEN];
            let (ctx, mut work) = (Context::of(param), Workspace::default());
            match codec.decode(ctx, &stream, &mut read, &mut work) {
                Ok(()) => assert!(&read == plane, "{writer}, {plane_name}: other bytes"),
                Err(error) => panic!("{writer}, {plane_name}: {error}"),
            }
            // Each byte of the stream counts: none may be missing, and none may follow.
            for cut in [1, 2, 4, 100] {
                let short = &stream[..stream.len() - cut];
                assert!(codec.decode(ctx, short, &mut read, &mut work).is_err());
            }
            let longer = [&stream[..], &[0; 4]].concat();
            assert!(codec.decode(ctx, &longer, &mut read, &mut work).is_err());
        }
    }
}

/// Literals in the best code of a block: nothing that codes literals only is shorter.
#[test]
fn our_gdeflate_is_no_longer_than_that_of_nvcomp() {
    let planes = data::planes(LEN);
    for (plane_name, file) in [("bf16 high", "bf16_high"), ("bf16 whole", "bf16_whole")] {
        let (_, plane) = planes.iter().find(|(name, _)| *name == plane_name).expect("a plane");
        let path = data::folder().join(format!("golden/nvcomp/gdeflate-0_{file}.bin"));
        let theirs = std::fs::metadata(path).expect("a golden file").len() as usize;
        let codec = Gdeflate::entropy_only();
        let mut dst = vec![0; codec.bound(0, LEN)];
        let symbols = Symbols::new(plane, Context::default());
        let ours =
            codec.encode(&symbols, &mut dst, &mut Workspace::default()).expect("encodes").len;
        assert!(ours <= theirs, "{plane_name}: {ours}, nvCOMP {theirs}");
        println!("{plane_name}: {ours}, nvCOMP {theirs}");
    }
}
