//! Names of certificates, beside those that QEMU prints.

use super::*;

fn der(tag: u8, contents: &[u8]) -> Vec<u8> {
    let mut out = vec![tag];
    match u8::try_from(contents.len()) {
        Ok(len) if len < 0x80 => out.push(len),
        _ => {
            out.push(0x82);
            out.extend(u16::try_from(contents.len()).unwrap().to_be_bytes());
        }
    }
    out.extend(contents);
    out
}

fn pair(identifier: &[u8], tag: u8, value: &[u8]) -> Vec<u8> {
    der(SEQUENCE, &[der(OBJECT, identifier), der(tag, value)].concat())
}

fn certificate(subject: &[Vec<u8>]) -> Vec<u8> {
    let fields = [
        der(VERSION, &[2, 1, 2]),
        der(2, &[1]),
        der(SEQUENCE, &[]),
        der(SEQUENCE, &[]),
        der(SEQUENCE, &[]),
        der(SEQUENCE, &subject.concat()),
    ];
    der(SEQUENCE, &der(SEQUENCE, &fields.concat()))
}

#[test]
fn a_name_is_as_qemu_compares_it() {
    let subject = [
        der(SET, &pair(&[0x55, 4, 6], 0x13, b"GB")),
        der(
            SET,
            &[pair(&[0x55, 4, 11], 0x0c, b"x#y"), pair(&[0x55, 4, 10], 0x0c, b"A, B  Corp")]
                .concat(),
        ),
        der(SET, &pair(&[0x55, 4, 7], 0x0c, b"R'lyeh")),
        der(SET, &pair(ATTRIBUTES[11].0, 0x16, b"a@b")),
        der(SET, &pair(&[0x55, 4, 3], 0x0c, b" cl\"i<ent; ")),
    ];
    // What qemu-nbd 7.2 said of a certificate with this name.
    let expected = r#"C=GB,OU=x#y+O=A\, B  Corp,L=R'lyeh,EMAIL=a@b,CN=\ cl\"i\<ent\;\ "#;
    assert_eq!(of_certificate(&certificate(&subject)).as_deref(), Some(expected));
    let long = "x".repeat(300);
    let subject = [der(SET, &pair(&[0x55, 4, 3], 0x0c, long.as_bytes()))];
    assert_eq!(of_certificate(&certificate(&subject)), Some(format!("CN={long}")));
}

#[test]
fn other_attributes_and_values_are_numbers() {
    let subject = [
        der(SET, &pair(&[0x2a, 0x03, 0x87, 0x68], 0x0c, b"v")),
        der(SET, &pair(&[0x55, 4, 3], 0x03, &[0, 1])),
        der(SET, &pair(&[0x55, 4, 10], BMP, &[0x20, 0xac])),
    ];
    let name = of_certificate(&certificate(&subject));
    assert_eq!(name.as_deref(), Some("1.2.3.1000=v,CN=#03020001,O=€"));
    assert_eq!(of_certificate(&certificate(&[])).as_deref(), Some(""));
}

#[test]
fn what_is_no_certificate_has_no_name() {
    let whole = certificate(&[der(SET, &pair(&[0x55, 4, 3], 0x0c, b"x"))]);
    for len in 0..whole.len() {
        assert_eq!(of_certificate(&whole[..len]), None, "{len}");
    }
    // Lengths that lead nowhere.
    for wrong in
        [[0x30, 0x80].as_slice(), &[0x30, 0x85, 1, 1, 1, 1, 1], &[0x30, 0x84, 255, 255, 255, 255]]
    {
        assert_eq!(of_certificate(wrong), None);
    }
}
