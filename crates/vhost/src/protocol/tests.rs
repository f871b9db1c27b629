//! Numbers and layouts against the specification.

use zerocopy::IntoBytes;

use super::*;

#[test]
fn numbers_and_names_agree() {
    for &request in Request::ALL {
        assert_eq!(Request::from_number(request as u32), Some(request));
    }
    assert_eq!(Request::ALL.len(), 31);
    assert_eq!(Request::AddMemReg as u32, 37);
    assert_eq!(Request::CheckDeviceState.name(), "CHECK_DEVICE_STATE");
}

#[test]
fn every_feature_that_a_request_needs_is_implemented_and_has_a_name() {
    for &request in Request::ALL {
        assert_eq!(request.feature() & !features::ALL, 0);
    }
    let named = (0..64).map(|bit| 1 << bit).filter(|bit| features::name(*bit) != "unknown");
    assert_eq!(named.fold(0, |all, bit| all | bit), features::ALL);
    assert_eq!(features::ALL, 0x9_b22b);
}

#[test]
fn the_change_of_configuration_space_is_a_header() {
    assert_eq!(config_change(), *[2u32, 1, 0].as_bytes());
}

#[test]
fn offsets_of_configuration_space_have_two_bases() {
    let start = |offset| ConfigHead { offset, size: 1, flags: 0 }.start();
    assert_eq!([0, 0xff, 0x100, 0x120].map(start), [0, 0xff, 0, 0x20]);
}
