use super::make::Maker;
use super::*;

fn parsed(bytes: &[u8]) -> Result<usize, Bad> {
    Btf::parse(bytes, None).map(|btf| btf.offsets.len())
}

#[test]
fn types_of_a_module_continue_those_of_the_kernel() {
    let mut base = Maker::base();
    let int = base.int("int", 4);
    let mut module = Maker::split(&base);
    let wide = module.int("wide", 8);
    module.structure("pair", 12, &[("small", int, 0), ("large", wide, 32)]);
    let (base, module) = (base.bytes(), module.bytes());

    let base = Btf::parse(&base, None).unwrap();
    let btf = Btf::parse(&module, Some(&base)).unwrap();

    let (id, pair) = btf.find(STRUCT, "pair").unwrap();
    assert_eq!((id, pair.word), (3, 12));
    let members: Vec<_> = pair.members().map(|m| (btf.text(m.name).unwrap(), m.at_bit)).collect();
    assert_eq!(members, [("small", 0), ("large", 32)]);
    assert_eq!(btf.find(INT, "int").unwrap().0, int);
    assert_eq!(btf.get(4).unwrap_err(), Bad::Type(4));
    assert_eq!(btf.get(0).unwrap_err(), Bad::Type(0));
    assert!(btf.find(STRUCT, "int").is_none());
}

#[test]
fn a_module_has_a_type_of_its_own_before_that_of_the_kernel() {
    let mut base = Maker::base();
    base.structure("same", 8, &[]);
    let mut module = Maker::split(&base);
    module.structure("same", 16, &[]);
    let (base, module) = (base.bytes(), module.bytes());
    let base = Btf::parse(&base, None).unwrap();

    let btf = Btf::parse(&module, Some(&base)).unwrap();

    assert_eq!(btf.find(STRUCT, "same").unwrap().1.word, 16);
}

#[test]
fn bit_fields_are_told_from_places() {
    let mut maker = Maker::base();
    let int = maker.int("int", 4);
    maker.add(STRUCT, "bits", (true, 1), 4, &[0, int, 3 << 24 | 17]);
    let bytes = maker.bytes();

    let btf = Btf::parse(&bytes, None).unwrap();

    let member = btf.find(STRUCT, "bits").unwrap().1.members().next().unwrap();
    assert_eq!((member.at_bit, member.bits), (17, 3));
}

#[test]
fn kinds_of_later_kernels_are_skipped_when_their_length_is_told() {
    let mut maker = Maker::base();
    maker.add(20, "", (false, 2), 0, &[1, 2, 3, 4, 5]);
    maker.int("int", 4);
    let unknown = maker.bytes();
    maker.layout = vec![0; 20 * 4];
    maker.layout.extend([4, 8, 0, 0]);
    let told = maker.bytes();

    assert_eq!(parsed(&unknown), Err(Bad::Kind(20)));
    assert_eq!(parsed(&told), Ok(2));
    assert_eq!(Btf::parse(&told, None).unwrap().find(INT, "int").unwrap().0, 2);
}

#[test]
fn what_is_no_btf_is_refused() {
    let mut maker = Maker::base();
    maker.int("int", 4);
    maker.structure("one", 4, &[("a", 1, 0)]);
    let good = maker.bytes();
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };

    assert_eq!(parsed(&good), Ok(2));
    assert_eq!(parsed(&[]), Err(Bad::Header));
    assert_eq!(parsed(&with(0, 0)), Err(Bad::Header));
    // Version, length of the header, and where types and texts are.
    for at in [2, 4, 11, 15, 19, 23] {
        assert!(parsed(&with(at, 0x7f)).is_err(), "byte {at}");
    }
    assert_eq!(parsed(&with(4, 23)), Err(Bad::Header));
    for len in 0..good.len() {
        assert!(parsed(&good[..len]).is_err(), "the first {len} bytes");
    }
}

#[test]
fn texts_that_are_not_there_are_errors() {
    let mut maker = Maker::base();
    maker.int("int", 4);
    let mut bytes = maker.bytes();
    let last = bytes.len() - 1;
    bytes[last] = 0xff;

    let btf = Btf::parse(&bytes, None).unwrap();

    assert_eq!(btf.text(1), Err(Bad::Text(1)));
    assert_eq!(btf.text(1000), Err(Bad::Text(1000)));
    assert_eq!(btf.text(0), Ok(""));
}
