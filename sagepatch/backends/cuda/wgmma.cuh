// The wgmma instructions of attention, every width that a head can have: `mma_qk` and `PV<n>::mma`.
// An instruction names each of its registers, hence the lists. Knows no attention.
//
// Shapes and syntax: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". Accumulators hold
// [64, n], 4 threads a row; operands of shared memory come as descriptors; `accumulate` 0 overwrites.

// "%0,%1,..": the first k operands of an instruction, and the same as elements of `d`.
#define R2 "%0,%1"
#define D2(c) c(d[0]), c(d[1])
#define R4 R2 ",%2,%3"
#define D4(c) D2(c), c(d[2]), c(d[3])
#define R6 R4 ",%4,%5"
#define D6(c) D4(c), c(d[4]), c(d[5])
#define R8 R6 ",%6,%7"
#define D8(c) D6(c), c(d[6]), c(d[7])
#define R10 R8 ",%8,%9"
#define D10(c) D8(c), c(d[8]), c(d[9])
#define R12 R10 ",%10,%11"
#define D12(c) D10(c), c(d[10]), c(d[11])
#define R14 R12 ",%12,%13"
#define D14(c) D12(c), c(d[12]), c(d[13])
#define R16 R14 ",%14,%15"
#define D16(c) D14(c), c(d[14]), c(d[15])
#define R18 R16 ",%16,%17"
#define D18(c) D16(c), c(d[16]), c(d[17])
#define R20 R18 ",%18,%19"
#define D20(c) D18(c), c(d[18]), c(d[19])
#define R22 R20 ",%20,%21"
#define D22(c) D20(c), c(d[20]), c(d[21])
#define R24 R22 ",%22,%23"
#define D24(c) D22(c), c(d[22]), c(d[23])
#define R26 R24 ",%24,%25"
#define D26(c) D24(c), c(d[24]), c(d[25])
#define R28 R26 ",%26,%27"
#define D28(c) D26(c), c(d[26]), c(d[27])
#define R30 R28 ",%28,%29"
#define D30(c) D28(c), c(d[28]), c(d[29])
#define R32 R30 ",%30,%31"
#define D32(c) D30(c), c(d[30]), c(d[31])
#define R34 R32 ",%32,%33"
#define D34(c) D32(c), c(d[32]), c(d[33])
#define R36 R34 ",%34,%35"
#define D36(c) D34(c), c(d[34]), c(d[35])
#define R38 R36 ",%36,%37"
#define D38(c) D36(c), c(d[36]), c(d[37])
#define R40 R38 ",%38,%39"
#define D40(c) D38(c), c(d[38]), c(d[39])
#define R42 R40 ",%40,%41"
#define D42(c) D40(c), c(d[40]), c(d[41])
#define R44 R42 ",%42,%43"
#define D44(c) D42(c), c(d[42]), c(d[43])
#define R46 R44 ",%44,%45"
#define D46(c) D44(c), c(d[44]), c(d[45])
#define R48 R46 ",%46,%47"
#define D48(c) D46(c), c(d[46]), c(d[47])
#define R50 R48 ",%48,%49"
#define D50(c) D48(c), c(d[48]), c(d[49])
#define R52 R50 ",%50,%51"
#define D52(c) D50(c), c(d[50]), c(d[51])
#define R54 R52 ",%52,%53"
#define D54(c) D52(c), c(d[52]), c(d[53])
#define R56 R54 ",%54,%55"
#define D56(c) D54(c), c(d[54]), c(d[55])
#define R58 R56 ",%56,%57"
#define D58(c) D56(c), c(d[56]), c(d[57])
#define R60 R58 ",%58,%59"
#define D60(c) D58(c), c(d[58]), c(d[59])
#define R62 R60 ",%60,%61"
#define D62(c) D60(c), c(d[60]), c(d[61])
#define R64 R62 ",%62,%63"
#define D64(c) D62(c), c(d[62]), c(d[63])
#define R66 R64 ",%64,%65"
#define D66(c) D64(c), c(d[64]), c(d[65])
#define R68 R66 ",%66,%67"
#define D68(c) D66(c), c(d[66]), c(d[67])
#define R70 R68 ",%68,%69"
#define D70(c) D68(c), c(d[68]), c(d[69])
#define R72 R70 ",%70,%71"
#define D72(c) D70(c), c(d[70]), c(d[71])
#define R74 R72 ",%72,%73"
#define D74(c) D72(c), c(d[72]), c(d[73])
#define R76 R74 ",%74,%75"
#define D76(c) D74(c), c(d[74]), c(d[75])
#define R78 R76 ",%76,%77"
#define D78(c) D76(c), c(d[76]), c(d[77])
#define R80 R78 ",%78,%79"
#define D80(c) D78(c), c(d[78]), c(d[79])
#define R82 R80 ",%80,%81"
#define D82(c) D80(c), c(d[80]), c(d[81])
#define R84 R82 ",%82,%83"
#define D84(c) D82(c), c(d[82]), c(d[83])
#define R86 R84 ",%84,%85"
#define D86(c) D84(c), c(d[84]), c(d[85])
#define R88 R86 ",%86,%87"
#define D88(c) D86(c), c(d[86]), c(d[87])
#define R90 R88 ",%88,%89"
#define D90(c) D88(c), c(d[88]), c(d[89])
#define R92 R90 ",%90,%91"
#define D92(c) D90(c), c(d[90]), c(d[91])
#define R94 R92 ",%92,%93"
#define D94(c) D92(c), c(d[92]), c(d[93])
#define R96 R94 ",%94,%95"
#define D96(c) D94(c), c(d[94]), c(d[95])
#define R98 R96 ",%96,%97"
#define D98(c) D96(c), c(d[96]), c(d[97])
#define R100 R98 ",%98,%99"
#define D100(c) D98(c), c(d[98]), c(d[99])
#define R102 R100 ",%100,%101"
#define D102(c) D100(c), c(d[100]), c(d[101])
#define R104 R102 ",%102,%103"
#define D104(c) D102(c), c(d[102]), c(d[103])
#define R106 R104 ",%104,%105"
#define D106(c) D104(c), c(d[104]), c(d[105])
#define R108 R106 ",%106,%107"
#define D108(c) D106(c), c(d[106]), c(d[107])
#define R110 R108 ",%108,%109"
#define D110(c) D108(c), c(d[108]), c(d[109])
#define R112 R110 ",%110,%111"
#define D112(c) D110(c), c(d[110]), c(d[111])
#define R114 R112 ",%112,%113"
#define D114(c) D112(c), c(d[112]), c(d[113])
#define R116 R114 ",%114,%115"
#define D116(c) D114(c), c(d[114]), c(d[115])
#define R118 R116 ",%116,%117"
#define D118(c) D116(c), c(d[116]), c(d[117])
#define R120 R118 ",%118,%119"
#define D120(c) D118(c), c(d[118]), c(d[119])
#define R122 R120 ",%120,%121"
#define D122(c) D120(c), c(d[120]), c(d[121])
#define R124 R122 ",%122,%123"
#define D124(c) D122(c), c(d[122]), c(d[123])
#define R126 R124 ",%124,%125"
#define D126(c) D124(c), c(d[124]), c(d[125])
#define R128 R126 ",%126,%127"
#define D128(c) D126(c), c(d[126]), c(d[127])

// d [64, n] int32 (+)= a [64, 32] b [n, 32]^T: INT8 codes, both in shared memory, 32 columns
// contiguous. `c` is n / 2; i0, i1, .. the operands behind d.
#define MMA_QK(n, c, i0, i1, i2)                                                                   \
  static __device__ __forceinline__ void mma_qk(int(&d)[c], uint64_t a, uint64_t b,                \
                                                int accumulate) {                                  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " i2 ", 0;"                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" R##c "}," i0 "," i1      \
                 ", p;}" : D##c("+r") : "l"(a), "l"(b), "r"(accumulate));                          \
  }

MMA_QK(64, 32, "%32", "%33", "%34")
MMA_QK(128, 64, "%64", "%65", "%66")
MMA_QK(192, 96, "%96", "%97", "%98")

// d [64, n] (+)= a [64, k] b [k, n], P in registers. k is 32 for E4M3 (V^T, keys contiguous) and 16
// for FP16 and BF16 (V, channels contiguous: the last immediate says so).
#if HALF_V
#if BF16_V
#define PV_CODES ".bf16.bf16"
#else
#define PV_CODES ".f16.f16"
#endif
#define PV_STEP "k16"
#define PV_TAIL ", p, 1, 1, 1;}"
#else
#define PV_CODES ".e4m3.e4m3"
#define PV_STEP "k32"
#define PV_TAIL ", p, 1, 1;}"
#endif
#if HALF_T
typedef uint32_t Accumulator;
#define PV_SUM ".f16"
#define PV_CONSTRAINT "+r"
#else
typedef float Accumulator;
#define PV_SUM ".f32"
#define PV_CONSTRAINT "+f"
#endif

template <int N> struct PV;
#define MMA_PV(n, c, i0, i1, i2, i3, i4, i5)                                                       \
  template <> struct PV<n> {                                                                       \
    static constexpr int REGISTERS = c;                                                            \
    static __device__ __forceinline__ void mma(Accumulator(&d)[c], const uint32_t* a, uint64_t b,          \
                                               int accumulate) {                                   \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " i5 ", 0;"                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #n PV_STEP PV_SUM PV_CODES " {" R##c "},{"  \
                   i0 "," i1 "," i2 "," i3 "}," i4 PV_TAIL                                         \
                   : D##c(PV_CONSTRAINT)                                                           \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));         \
    }                                                                                              \
  };

#if HALF_T
MMA_PV(8, 2, "%2", "%3", "%4", "%5", "%6", "%7")
MMA_PV(16, 4, "%4", "%5", "%6", "%7", "%8", "%9")
MMA_PV(24, 6, "%6", "%7", "%8", "%9", "%10", "%11")
MMA_PV(32, 8, "%8", "%9", "%10", "%11", "%12", "%13")
MMA_PV(40, 10, "%10", "%11", "%12", "%13", "%14", "%15")
MMA_PV(48, 12, "%12", "%13", "%14", "%15", "%16", "%17")
MMA_PV(56, 14, "%14", "%15", "%16", "%17", "%18", "%19")
MMA_PV(64, 16, "%16", "%17", "%18", "%19", "%20", "%21")
MMA_PV(72, 18, "%18", "%19", "%20", "%21", "%22", "%23")
MMA_PV(80, 20, "%20", "%21", "%22", "%23", "%24", "%25")
MMA_PV(88, 22, "%22", "%23", "%24", "%25", "%26", "%27")
MMA_PV(96, 24, "%24", "%25", "%26", "%27", "%28", "%29")
MMA_PV(104, 26, "%26", "%27", "%28", "%29", "%30", "%31")
MMA_PV(112, 28, "%28", "%29", "%30", "%31", "%32", "%33")
MMA_PV(120, 30, "%30", "%31", "%32", "%33", "%34", "%35")
MMA_PV(128, 32, "%32", "%33", "%34", "%35", "%36", "%37")
MMA_PV(136, 34, "%34", "%35", "%36", "%37", "%38", "%39")
MMA_PV(144, 36, "%36", "%37", "%38", "%39", "%40", "%41")
MMA_PV(152, 38, "%38", "%39", "%40", "%41", "%42", "%43")
MMA_PV(160, 40, "%40", "%41", "%42", "%43", "%44", "%45")
MMA_PV(168, 42, "%42", "%43", "%44", "%45", "%46", "%47")
MMA_PV(176, 44, "%44", "%45", "%46", "%47", "%48", "%49")
MMA_PV(184, 46, "%46", "%47", "%48", "%49", "%50", "%51")
MMA_PV(192, 48, "%48", "%49", "%50", "%51", "%52", "%53")
MMA_PV(200, 50, "%50", "%51", "%52", "%53", "%54", "%55")
MMA_PV(208, 52, "%52", "%53", "%54", "%55", "%56", "%57")
MMA_PV(216, 54, "%54", "%55", "%56", "%57", "%58", "%59")
MMA_PV(224, 56, "%56", "%57", "%58", "%59", "%60", "%61")
MMA_PV(232, 58, "%58", "%59", "%60", "%61", "%62", "%63")
MMA_PV(240, 60, "%60", "%61", "%62", "%63", "%64", "%65")
MMA_PV(248, 62, "%62", "%63", "%64", "%65", "%66", "%67")
MMA_PV(256, 64, "%64", "%65", "%66", "%67", "%68", "%69")
#else
MMA_PV(8, 4, "%4", "%5", "%6", "%7", "%8", "%9")
MMA_PV(16, 8, "%8", "%9", "%10", "%11", "%12", "%13")
MMA_PV(24, 12, "%12", "%13", "%14", "%15", "%16", "%17")
MMA_PV(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
MMA_PV(40, 20, "%20", "%21", "%22", "%23", "%24", "%25")
MMA_PV(48, 24, "%24", "%25", "%26", "%27", "%28", "%29")
MMA_PV(56, 28, "%28", "%29", "%30", "%31", "%32", "%33")
MMA_PV(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
MMA_PV(72, 36, "%36", "%37", "%38", "%39", "%40", "%41")
MMA_PV(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
MMA_PV(88, 44, "%44", "%45", "%46", "%47", "%48", "%49")
MMA_PV(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
MMA_PV(104, 52, "%52", "%53", "%54", "%55", "%56", "%57")
MMA_PV(112, 56, "%56", "%57", "%58", "%59", "%60", "%61")
MMA_PV(120, 60, "%60", "%61", "%62", "%63", "%64", "%65")
MMA_PV(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
MMA_PV(136, 68, "%68", "%69", "%70", "%71", "%72", "%73")
MMA_PV(144, 72, "%72", "%73", "%74", "%75", "%76", "%77")
MMA_PV(152, 76, "%76", "%77", "%78", "%79", "%80", "%81")
MMA_PV(160, 80, "%80", "%81", "%82", "%83", "%84", "%85")
MMA_PV(168, 84, "%84", "%85", "%86", "%87", "%88", "%89")
MMA_PV(176, 88, "%88", "%89", "%90", "%91", "%92", "%93")
MMA_PV(184, 92, "%92", "%93", "%94", "%95", "%96", "%97")
MMA_PV(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
MMA_PV(200, 100, "%100", "%101", "%102", "%103", "%104", "%105")
MMA_PV(208, 104, "%104", "%105", "%106", "%107", "%108", "%109")
MMA_PV(216, 108, "%108", "%109", "%110", "%111", "%112", "%113")
MMA_PV(224, 112, "%112", "%113", "%114", "%115", "%116", "%117")
MMA_PV(232, 116, "%116", "%117", "%118", "%119", "%120", "%121")
MMA_PV(240, 120, "%120", "%121", "%122", "%123", "%124", "%125")
MMA_PV(248, 124, "%124", "%125", "%126", "%127", "%128", "%129")
MMA_PV(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")
#endif
