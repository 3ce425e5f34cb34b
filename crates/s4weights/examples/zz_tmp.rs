use s4weights::*;
use std::time::Instant;
fn main() {
    let simd: Option<Simd> = std::env::args().nth(2).map(|s| s.parse().unwrap());
    let threads = std::env::args().nth(3).map_or(1, |s| s.parse().unwrap());
    let o = MemoryOptions { preset: Preset::Fast, threads: Some(threads), simd };
    let codec = TensorCodec::new(o).unwrap();
    for f in std::fs::read_dir(std::env::args().nth(1).unwrap()).unwrap() {
        let p = f.unwrap().path();
        if p.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let data = std::fs::read(&p).unwrap();
        let st = safetensors::SafeTensors::deserialize(&data).unwrap();
        let mut w = Writer::create(
            Target::Path("/dev/shm/x.s4w".into()),
            WriteOptions { threads: Some(threads), simd, ..Default::default() },
        )
        .unwrap();
        let names = st.names();
        let mut inb = 0;
        let (mut te, mut td) = (0.0, 0.0);
        let mut detail = String::new();
        for n in &names {
            let t = st.tensor(n).unwrap();
            let dt = match t.dtype() {
                safetensors::Dtype::F32 => DType::Float32,
                safetensors::Dtype::BF16 => DType::BFloat16,
                d => panic!("{d:?}"),
            };
            let shape: Vec<u64> = t.shape().iter().map(|&x| x as u64).collect();
            w.write(&[TensorSource { name: n, dtype: dt, shape: &shape, data: t.data() }]).unwrap();
            inb += t.data().len();
            if t.data().len() < 100000 {
                continue;
            }
            let view = TensorView { dtype: dt, shape: &shape, data: t.data() };
            let o = MemoryOptions { preset: Preset::Fast, threads: Some(threads), simd };
            let mut be = f64::MAX;
            let mut bd = f64::MAX;
            let mut out = vec![0u8; t.data().len()];
            let mut sz = 0;
            for _ in 0..25 {
                let t0 = Instant::now();
                let c = codec.compress(&view).unwrap();
                be = be.min(t0.elapsed().as_secs_f64());
                sz = c.bytes();
                let t0 = Instant::now();
                codec.decompress(&c, &mut out).unwrap();
                bd = bd.min(t0.elapsed().as_secs_f64());
                assert!(out == t.data());
            }
            te += be;
            td += bd;
            detail += &format!(
                "   {n:50} ratio {:.4} enc {:.2} dec {:.2} GB/s\n",
                t.data().len() as f64 / sz as f64,
                t.data().len() as f64 / be / 1e9,
                t.data().len() as f64 / bd / 1e9
            );
        }
        let r = w.finish(Contents::default()).unwrap();
        println!(
            "{:30} ratio {:.4}  enc {:.2} dec {:.2} GB/s",
            p.file_stem().unwrap().to_string_lossy(),
            inb as f64 / r.bytes_out as f64,
            inb as f64 / te / 1e9,
            inb as f64 / td / 1e9
        );
        if std::env::var("V").is_ok() {
            print!("{detail}");
            for (k, s) in &r.streams {
                println!("     {k:40} {:.4} b/v {} values", s.bits_per_value, s.values);
            }
        }
        let rd =
            Reader::open(Source::Path("/dev/shm/x.s4w".into()), ReadOptions::default()).unwrap();
        for n in &names {
            assert!(rd.read(n).unwrap() == st.tensor(n).unwrap().data());
        }
        rd.verify().unwrap();
    }
}
