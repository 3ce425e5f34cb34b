//! Options of the formats: 64 bytes each, passed by value. Unnamed bytes are reserved and 0.

/// The type of the values in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct DataType(pub u32);

impl DataType {
    /// Bytes.
    pub const CHAR: Self = Self(0);
    /// Unsigned bytes.
    pub const UCHAR: Self = Self(1);
    /// Signed integers of 2 bytes.
    pub const SHORT: Self = Self(2);
    /// Unsigned integers of 2 bytes.
    pub const USHORT: Self = Self(3);
    /// Signed integers of 4 bytes.
    pub const INT: Self = Self(4);
    /// Unsigned integers of 4 bytes.
    pub const UINT: Self = Self(5);
    /// Signed integers of 8 bytes.
    pub const LONGLONG: Self = Self(6);
    /// Unsigned integers of 8 bytes.
    pub const ULONGLONG: Self = Self(7);
    /// Floats of 1 byte, E4M3.
    pub const FLOAT8_E4M3: Self = Self(9);
    /// Floats of 2 bytes: both fp16 and bf16.
    pub const FLOAT16: Self = Self(10);
    /// Floats of 4 bytes.
    pub const FLOAT32: Self = Self(11);
    /// Floats of 8 bytes.
    pub const FLOAT64: Self = Self(12);
    /// Whatever the stream says.
    pub const BITS: Self = Self(0xff);

    /// Bytes of a value; 1 for [`Self::BITS`] and types that are not listed here.
    pub fn width(self) -> usize {
        match self.0 {
            2 | 3 | 10 => 2,
            4 | 5 | 11 => 4,
            6 | 7 | 12 => 8,
            _ => 1,
        }
    }
}

/// The backend that decompresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Backend(pub u32);

impl Backend {
    /// The library's choice.
    pub const DEFAULT: Self = Self(0);
    /// The decompression engine of newer GPUs, which does not report errors of single blocks.
    pub const HARDWARE: Self = Self(1);
    /// CUDA kernels.
    pub const CUDA: Self = Self(2);
}

macro_rules! options {
    ($($(#[$doc:meta])* $name:ident, $size:literal {
        $($(#[$fdoc:meta])* $field:ident @ $offset:literal: $type:ty = $default:expr,)*
        ..$reserved:literal
    })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq)]
        #[repr(C)]
        pub struct $name {
            $($(#[$fdoc])* pub $field: $type,)*
            reserved: [u8; $reserved],
        }
        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* reserved: [0; $reserved] }
            }
        }
        const _: () = {
            assert!(size_of::<$name>() == $size);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
    )*};
}

options! {
    /// Options of ANS, compressing.
    AnsCompress, 64 {
        /// 0: rANS.
        kind @ 0: u32 = 0,
        /// `CHAR`, `UCHAR`, `FLOAT8_E4M3`, `FLOAT16` or `FLOAT32`.
        data_type @ 4: DataType = DataType::CHAR,
        /// A power of two from 4 to 64; 0: 8.
        max_sub_chunks @ 8: u8 = 0,
        /// 0: the library's choice.
        states_per_lane @ 9: u8 = 0,
        /// The table is built from one in 2^n values, n from 0 to 8.
        histogram_reduction_log2 @ 10: u8 = 0,
        ..53
    }
    /// Options of ANS, decompressing.
    AnsDecompress, 64 {
        /// The backend that decompresses.
        backend @ 0: Backend = Backend::DEFAULT,
        /// `BITS`, or the type that the stream was written with.
        data_type @ 4: DataType = DataType::BITS,
        /// The same as when compressing, or more; 0: 8.
        max_sub_chunks @ 8: u8 = 0,
        /// 0: the library's choice.
        states_per_lane @ 9: u8 = 0,
        /// 1: trust the stream.
        skip_validation @ 10: u8 = 0,
        ..53
    }
    /// Options of GDeflate and Deflate, compressing.
    WithAlgorithm, 64 {
        /// 0 (literals only, the fastest) to 5 (the smallest).
        algorithm @ 0: i32 = 1,
        ..60
    }
    /// Options of Zstd and Snappy, compressing.
    NoOptions, 64 { ..64 }
    /// Options of GDeflate, Zstd and Bitcomp, decompressing.
    PlainDecompress, 64 {
        /// The backend that decompresses.
        backend @ 0: Backend = Backend::DEFAULT,
        ..60
    }
    /// Options of Deflate and Snappy, decompressing.
    SortingDecompress, 64 {
        /// The backend that decompresses.
        backend @ 0: Backend = Backend::DEFAULT,
        /// If not 0, the decompression engine gets the large blocks first.
        sort_before_hardware @ 4: i32 = 0,
        ..56
    }
    /// Options of LZ4, compressing.
    Lz4Compress, 64 {
        /// Type of the values to find matches of; only its width counts.
        data_type @ 0: DataType = DataType::CHAR,
        /// 0: the output is an LZ4 block; others shuffle bits first.
        bit_shuffle @ 4: u32 = 0,
        ..56
    }
    /// Options of LZ4, decompressing.
    Lz4Decompress, 64 {
        /// The backend that decompresses.
        backend @ 0: Backend = Backend::DEFAULT,
        /// If not 0, the decompression engine gets the large blocks first.
        sort_before_hardware @ 4: i32 = 0,
        /// The same as when compressing.
        data_type @ 8: DataType = DataType::CHAR,
        /// The same as when compressing.
        bit_shuffle @ 12: u32 = 0,
        ..48
    }
    /// Options of Bitcomp, compressing.
    BitcompCompress, 64 {
        /// 0 general, 1 for mostly zeros.
        algorithm @ 0: i32 = 0,
        /// An integer type; its width is what counts.
        data_type @ 4: DataType = DataType::UCHAR,
        /// Quantisation step of lossy modes.
        delta @ 8: f64 = 0.0,
        /// 0: lossless.
        mode @ 16: u32 = 0,
        ..44
    }
    /// Options of Cascaded, compressing.
    CascadedCompress, 64 {
        /// Type and stages.
        common @ 0: CascadedCommon = CascadedCommon::compressing(),
        /// Stages that may be used: 1 delta, 2 run lengths, 4 frame of reference.
        fine_stages @ 24: u64 = 7,
        /// The most stages, 0 to 7.
        level @ 32: u8 = 3,
        ..31
    }
    /// Options of Cascaded, decompressing.
    CascadedDecompress, 64 {
        /// The backend that decompresses.
        backend @ 0: Backend = Backend::DEFAULT,
        /// The settings that the stream was written with, or "whatever the stream says".
        common @ 8: CascadedCommon = CascadedCommon::decompressing(),
        ..32
    }
}

/// The options that both directions of Cascaded share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct CascadedCommon {
    /// An integer type. All blocks of a batch have values of one width.
    pub data_type: DataType,
    /// 0 whatever the stream says, 1 asymmetric (a small stream), 2 symmetric (fast to write).
    pub mode: u32,
    /// Codec of the last stage: 1, or 0 with mode 0.
    pub terminal: u64,
    /// Stages before all others: 0, none.
    pub coarse_stages: u64,
}

impl CascadedCommon {
    const fn compressing() -> Self {
        Self { data_type: DataType::UINT, mode: 1, terminal: 1, coarse_stages: 0 }
    }
    const fn decompressing() -> Self {
        Self { data_type: DataType::BITS, mode: 0, terminal: 0, coarse_stages: 0 }
    }
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<CascadedCommon>() == 24);
    assert!(offset_of!(CascadedCommon, mode) == 4 && offset_of!(CascadedCommon, terminal) == 8);
    assert!(offset_of!(CascadedCommon, coarse_stages) == 16);
};
