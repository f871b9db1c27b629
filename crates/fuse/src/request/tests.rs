//! Frames as tables of bytes (little-endian machines), and "no panic on any bytes".

use proptest::prelude::*;

use super::{Operation, ParseError, Request, opcode_expects_reply};
use crate::abi::opcode;
use crate::abi::{
    FallocateIn, GetattrIn, InHeader, InitIn, LseekIn, OpenIn, REQUEST_HEAD_BYTES, ReadIn,
    SetattrIn, WriteIn,
};

/// A header: length, opcode, unique 0x1122, node 1, uid 1000, gid 100, pid 77.
fn frame(opcode: u8, arguments: &[u8]) -> Vec<u8> {
    let len = u8::try_from(40 + arguments.len()).expect("short frame");
    let mut bytes = vec![len, 0, 0, 0, opcode, 0, 0, 0];
    bytes.extend([0x22, 0x11, 0, 0, 0, 0, 0, 0]);
    bytes.extend([1, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend([0xe8, 0x03, 0, 0, 100, 0, 0, 0, 77, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend(arguments);
    bytes
}

fn parse(bytes: &[u8]) -> Result<Request, ParseError> {
    Request::parse(&bytes[..bytes.len().min(REQUEST_HEAD_BYTES)], bytes.len())
}

fn operation(opcode: u8, arguments: &[u8]) -> Operation {
    parse(&frame(opcode, arguments)).expect("a good frame").operation
}

#[test]
fn the_header_is_read_field_by_field() {
    let request = parse(&frame(17, &[])).expect("STATFS");
    let expected = InHeader {
        len: 40,
        opcode: opcode::STATFS,
        unique: 0x1122,
        nodeid: 1,
        uid: 1000,
        gid: 100,
        pid: 77,
        total_extlen: 0,
        padding: 0,
    };
    assert_eq!(request.header, expected);
    assert_eq!(request.operation, Operation::Statfs);
}

#[test]
fn a_read_is_read_field_by_field() {
    let arguments = [
        1, 0, 0, 0, 0, 0, 0, 0, // fh
        0, 0x10, 0, 0, 1, 0, 0, 0, // offset
        0, 0, 0x10, 0, // size
        2, 0, 0, 0, // read_flags
        9, 0, 0, 0, 0, 0, 0, 0x80, // lock_owner
        0, 0x40, 0, 0, // flags
        0, 0, 0, 0, // padding
    ];
    let expected = ReadIn {
        fh: 1,
        offset: 0x1_0000_1000,
        size: 1 << 20,
        read_flags: 2,
        lock_owner: 0x8000_0000_0000_0009,
        flags: 0x4000,
        padding: 0,
    };
    assert_eq!(operation(15, &arguments), Operation::Read(expected));
}

#[test]
fn a_write_is_read_and_its_data_left_alone() {
    let arguments = [
        1, 0, 0, 0, 0, 0, 0, 0, // fh
        7, 0, 0, 0, 0, 0, 0, 0, // offset
        3, 0, 0, 0, // size
        4, 0, 0, 0, // write_flags
        0, 0, 0, 0, 0, 0, 0, 0, // lock_owner
        1, 0x10, 0, 0, // flags
        0, 0, 0, 0, // padding
        b'a', b'b', b'c',
    ];
    let expected = WriteIn {
        fh: 1,
        offset: 7,
        size: 3,
        write_flags: 4,
        lock_owner: 0,
        flags: 0x1001,
        padding: 0,
    };
    assert_eq!(operation(16, &arguments), Operation::Write(expected));
}

#[test]
fn a_write_of_a_mebibyte_is_parsed_from_its_first_bytes() {
    let total: u32 = 80 + (1 << 20);
    let mut head = frame(16, &[0; 88]);
    head[..4].copy_from_slice(&total.to_le_bytes());
    head[40 + 16..40 + 20].copy_from_slice(&(1u32 << 20).to_le_bytes());
    let request = Request::parse(&head[..REQUEST_HEAD_BYTES], total as usize).expect("WRITE");
    let Operation::Write(argument) = request.operation else { panic!("{request:?}") };
    assert_eq!(argument.size, 1 << 20);
}

#[test]
fn a_write_whose_data_is_not_as_long_as_announced_is_refused_alone() {
    let mut arguments = [0; 43];
    arguments[16] = 4;
    let error = parse(&frame(16, &arguments)).expect_err("3 bytes of 4");
    assert!(matches!(error, ParseError::Arguments { header } if header.unique == 0x1122));
    assert!(!error.is_fatal());
}

#[test]
fn a_setattr_is_read_field_by_field() {
    let mut arguments = [0; 88];
    arguments[0] = 0x4b; // mode, uid, size, fh
    arguments[8] = 1; // fh
    arguments[16..24].copy_from_slice(&[0, 0, 0, 0x40, 0, 0, 0, 0]); // size 1 GiB
    arguments[68..70].copy_from_slice(&[0x80, 0x81]); // mode 0100600
    arguments[76] = 5; // uid
    arguments[80] = 6; // gid
    let expected = SetattrIn {
        valid: 0x4b,
        fh: 1,
        size: 1 << 30,
        mode: 0o100_600,
        uid: 5,
        gid: 6,
        ..SetattrIn::default()
    };
    assert_eq!(operation(4, &arguments), Operation::Setattr(expected));
}

#[test]
fn an_init_of_an_old_kernel_is_filled_with_zeroes() {
    let arguments = [7, 0, 0, 0, 23, 0, 0, 0, 0, 0, 2, 0, 0xfb, 0xff, 0x03, 0];
    let expected = InitIn {
        major: 7,
        minor: 23,
        max_readahead: 0x2_0000,
        flags: 0x3_fffb,
        flags2: 0,
        unused: [0; 11],
    };
    assert_eq!(operation(26, &arguments), Operation::Init(expected));
}

#[test]
fn small_operations_are_read() {
    let cases: [(u8, Vec<u8>, Operation); 5] = [
        (
            3,
            vec![1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
            Operation::Getattr(GetattrIn { getattr_flags: 1, dummy: 0, fh: 1 }),
        ),
        (
            14,
            vec![2, 0x80, 0, 0, 1, 0, 0, 0],
            Operation::Open(OpenIn { flags: 0x8002, open_flags: 1 }),
        ),
        (
            43,
            [[1u8, 0, 0, 0, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0, 0, 0], [0, 4, 0, 0, 0, 0, 0, 0]]
                .concat()
                .into_iter()
                .chain([3, 0, 0, 0, 0, 0, 0, 0])
                .collect(),
            Operation::Fallocate(FallocateIn {
                fh: 1,
                offset: 512,
                length: 1024,
                mode: 3,
                padding: 0,
            }),
        ),
        (
            46,
            vec![1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0],
            Operation::Lseek(LseekIn { fh: 1, offset: 512, whence: 3, padding: 0 }),
        ),
        (1, b"name\0".to_vec(), Operation::Lookup),
    ];
    for (opcode, arguments, expected) in cases {
        assert_eq!(operation(opcode, &arguments), expected);
    }
}

#[test]
fn an_operation_that_we_do_not_have_is_unsupported_and_expects_a_reply() {
    for opcode in [22, 39, 52, 255] {
        let request = parse(&frame(opcode, &[])).expect("a good frame");
        assert_eq!(request.operation, Operation::Unsupported(u32::from(opcode)));
        assert!(request.expects_reply());
    }
}

#[test]
fn forgets_and_interrupts_expect_no_reply() {
    for opcode in [2, 36, 41, 42] {
        let request = parse(&frame(opcode, &[0; 8])).expect("a good frame");
        assert!(!request.expects_reply());
        assert!(!opcode_expects_reply(u32::from(opcode)));
    }
}

#[test]
fn fewer_bytes_than_a_header_are_fatal() {
    for len in [0, 1, 39] {
        let error = parse(&frame(17, &[])[..len]).expect_err("too short");
        assert_eq!(error, ParseError::ShortHeader { received: len });
        assert!(error.is_fatal());
    }
}

#[test]
fn a_length_that_is_not_the_one_received_is_fatal() {
    let mut bytes = frame(17, &[]);
    bytes[0] = 41;
    let error = parse(&bytes).expect_err("41 stated, 40 received");
    assert_eq!(error, ParseError::Length { stated: 41, received: 40 });
    assert!(error.is_fatal());
    assert_eq!(error.to_string(), "request states 41 bytes but 40 were received");
}

#[test]
fn arguments_that_end_early_are_refused_alone() {
    let cases =
        [(3, 15), (4, 87), (14, 7), (15, 39), (16, 39), (18, 23), (20, 15), (25, 23), (26, 15)];
    for (opcode, len) in cases {
        let error = parse(&frame(opcode, &vec![0; len])).expect_err("short arguments");
        assert!(!error.is_fatal(), "opcode {opcode}");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..300),
    fix in any::<bool>(), code in 0u8..60) {
        if fix && bytes.len() >= 8 {
            let len = u32::try_from(bytes.len()).expect("short");
            bytes[..4].copy_from_slice(&len.to_ne_bytes());
            bytes[4..8].copy_from_slice(&u32::from(code).to_ne_bytes());
        }
        let _ = parse(&bytes);
    }

    #[test]
    fn no_parts_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..140),
    length in 0usize..200, code in 0u32..60) {
        let header = InHeader { opcode: code, ..InHeader::default() };
        let _ = Request::from_parts(header, &bytes, length);
    }
}
